"""Who is there, which version is on its way, and what became of it.

    messages   the types that travel, and nothing else does
    store      one job's state, as a pure state machine: what its parts below do to each other
      members    who is there: leases and fences   runs      the trainer's ranks
      engines    workers and elected controllers     versions  epochs, and what comes next
      sync       one version and its outcomes        values    blobs and keys
    server     the store over HTTP, behind a bearer token
    client     how writers, workers and controllers reach it

``import awex_core.meta`` loads none of them: an engine worker needs no web server.
"""
