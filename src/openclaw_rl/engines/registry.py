"""The table of engines. To add one, write a package with factories (see `engines.factory`) and add it here.

Only the options of an engine are imported here. `engines.factory` imports its factories when they are used.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from openclaw_rl.config.options import Section
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.outside.options import OutsideOptions, SlimeOptions
from openclaw_rl.engines.remote.options import SglangOptions, VllmOptions
from openclaw_rl.engines.tinker.options import TinkerOptions
from openclaw_rl.engines.upstream.options import UpstreamOptions


class Entry(NamedTuple):
    """The module of an engine's factories, and the section of its options."""

    module: str
    section: type[Section]
    asked_for: Callable[[Any], bool] = lambda _section: False
    """Whether the environment asks for this engine: --backend auto then chooses it."""
    outside: bool = False
    """Whether it is a trainer outside this program, which claims judged turns over HTTP."""
    takes_text: bool = False
    """Whether its model is given messages, and its tokens and weights are elsewhere."""


LOCAL = Entry("openclaw_rl.engines.local.factory", LocalOptions)
TINKER = Entry("openclaw_rl.engines.tinker.factory", TinkerOptions, lambda options: options.has_account)
VLLM = Entry("openclaw_rl.engines.remote.vllm", VllmOptions)
OUTSIDE = Entry("openclaw_rl.engines.outside.factory", OutsideOptions, outside=True)
SLIME = Entry("openclaw_rl.engines.outside.slime", SlimeOptions, outside=True)
SGLANG = Entry("openclaw_rl.engines.remote.sglang", SglangOptions)
UPSTREAM = Entry("openclaw_rl.engines.upstream.factory", UpstreamOptions, takes_text=True)

#: Engines that sample tokens: their modules have a `SamplerFactory` named SAMPLER.
SAMPLERS = {"local": LOCAL, "tinker": TINKER, "vllm": VLLM, "sglang": SGLANG, "upstream": UPSTREAM}
#: Engines that compute gradients: their modules have a `LearnerFactory` named LEARNER.
LEARNERS = {"local": LOCAL, "tinker": TINKER, "outside": OUTSIDE, "slime": SLIME}


def names_code(engine: str) -> bool:
    """Whether the name of an engine is one of the user's code: `path/file.py` or `package.module:name`."""
    return ":" in engine or engine.endswith(".py")


def backends() -> list[str]:
    """The engines that both sample and train."""
    return [name for name in SAMPLERS if name in LEARNERS]


def default_backend(sections: Mapping[type[Section], Section]) -> str:
    """What --backend auto stands for: the engine that the environment asks for, or the local one."""
    asked_for = [name for name in backends() if SAMPLERS[name].asked_for(sections[SAMPLERS[name].section])]
    return asked_for[0] if asked_for else "local"


def engine_sections() -> list[type[Section]]:
    """The options of all engines, each section once."""
    return list(dict.fromkeys(entry.section for entry in (*SAMPLERS.values(), *LEARNERS.values())))
