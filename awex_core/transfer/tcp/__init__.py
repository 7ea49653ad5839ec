"""``tcp``: packed buckets over connections of our own, between hosts and sites.

Each worker connects to each writer rank that serves it. Both prove that they know the session's secret, which the
meta server keeps, before a weight moves (``greeting``); with ``AWEX_TLS_*`` set the connection is TLS, certificates
both ways. Then, for each version (a *round*):

    worker -> writer   READY: the round, how many frames it has applied, whether it still holds what came before
    writer -> worker   frames: a bucket each, whole or what has changed in it, with its CRC32C (``frames``)
    worker -> writer   ACK of each frame once it is applied; no more than ``WINDOW`` are on their way
    writer -> worker   DONE

Live memory is still for as long as a version is sent, so a frame is made again rather than kept: a connection that
breaks is made anew by the worker, and goes on from the first frame that was not acknowledged.

    settings   what the environment says          delta      what has changed between two byte strings, and back
    frames     messages as bytes                  bases      what the other end is known to hold
    line       one connection, with limits        codec      zstd, where it pays
    greeting   who is at the other end            flow       a pair's pieces, and the buckets of one round
    listener   where workers connect to           sender, receiver, transport
"""
