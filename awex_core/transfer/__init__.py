"""MOVES bytes. A transport executes copy programs; it does not know what a tensor is.

transport   the contract: what a session asks of a transport before anything is open
base        the contract of what is open: what a sender and a receiver do, and when
registry    all that are installed, those of other packages too; settings knows their names
shm         same host, CPU: the reader takes the bytes out of the writer's memory
shm_staged  the same where the kernel forbids that: packed buckets through shared memory
ipc         same host, GPU: the reader maps the writer's memory, and pulls with kernels
mappers     who has memory of another process mapped, and until when
group       ``nccl``: packed buckets over a process group of its own (gloo on CPU)
buckets     pieces -> fixed-size buckets, the same on both ends
checksum    CRC32C of buckets in CPU memory, at both ends of a wire
"""
