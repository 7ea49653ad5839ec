"""Who is there, which version is on its way, and what became of it.

    messages   the types that travel, and nothing else does     release  which releases understand each other
    store      one job's state, as a pure state machine: what its parts below do to each other
      members    who is there, leases and fences     runs      the trainer's ranks
      engines    workers and elected controllers     versions  epochs, and what comes next
      sync       one version and its outcomes        catch_ups the same from engine to engine
      values     blobs and keys                      revision  what has changed, and whom it concerns
    views      what each role is shown of it         answers   each encoded once
    server     the store over HTTP, behind a bearer token: routes and their description (openapi), jobs in memory (job)
    machine, replicated, redis_store    the same store, driven by a log in Redis
    client     how writers, workers and controllers reach it, over a connection; leases keeps them in

``import awex_core.meta`` loads none of them: an engine worker needs no web server.
"""
