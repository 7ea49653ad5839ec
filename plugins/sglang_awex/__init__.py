"""SGLang serves the trainer's newest weights: ``sglang serve MODEL --weight-sync-backend=awex ...``.

__init__   what SGLang calls in every process
hooks      flags and launcher where engines start, commands where they run
options    the flags, and what they do not go with
calls      SGLang's own calls, and what each does to the engine
refusals   what of SGLang does not go with following a trainer
guard      the tokenizer manager, which calls pass: who pauses, who waits
worker     one scheduler rank: a ``WeightReader``, driven by commands to all ranks
model      one rank's parameters, traced through SGLang's own loader
host       one engine: pause, receive, resume; status and refusal over HTTP
kept       what no checkpoint fills, and may stay as it is
compat     the only file that touches private SGLang names
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point ``sglang.srt.plugins``; called in every SGLang process.

    Without the flag (or ``AWEX_BACKEND=awex``) this adds the flags and changes nothing else.

    Raises:
        SystemExit: this SGLang lacks something the plugin needs, and weight sync is asked for. (SGLang
            only logs other exceptions, and would serve weights that no trainer ever reaches.)
    """
    from sglang_awex.hooks import hook_process

    hook_process()


def wait_for_version(engine: Any, *, timeout_s: float = 300.0) -> str:
    """Let an offline ``sgl.Engine`` take the next version; returns the one it serves then, as ``EPOCH.NUMBER``.

    An offline engine works only while one of its methods runs. A version that
    the trainer publishes in between waits for the next call, of ``generate`` or of this.

    Raises:
        SyncTimeout: no newer version was committed within ``timeout_s``.
        ConfigError: the engine was started without ``AWEX_BACKEND=awex``.
    """
    from sglang_awex.host import wait_for_version as wait

    return wait(engine, timeout_s)
