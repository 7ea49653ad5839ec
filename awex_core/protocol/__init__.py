"""What each member of a job decides: what it knows and the job's view in, what it does next out.

    sessions     which two ends belong together, and when what they share is over
    publishing   a trainer's rank: whose version that is, what comes next builds on, whom to serve
    receiving    an engine's worker: which version to take, how much of it, whether it has arrived
    lending      a worker that another engine takes its weights from
    controlling  an engine's controller: what is to be done about its engine now
    updating     one version in one engine, from phase to phase
    owning       what a worker's memory is, after calls of the engine's own

Functions of their arguments: no clock, no network, no thread, no weights. ``awex_core.sync`` carries out what they say,
and the model of the protocol (``tests/support/model``) runs the same functions in schedules drawn at random, with
everything failing that can.

Per decision there are three questions: who may say so, until when, and what if the answer never comes.
"""
