"""MOVES bytes. A transport executes copy programs; it does not know what a tensor is.

base      the contract: what a sender and a receiver do, and when
choice    which transport serves which pair of ranks
shm       same host, CPU: the reader takes the bytes out of the writer's memory
group     ``nccl``: packed buckets over a process group of its own (gloo on CPU)
buckets   pieces -> fixed-size buckets, the same on both ends
checksum  CRC32C of buckets in CPU memory, at both ends of a wire
"""
