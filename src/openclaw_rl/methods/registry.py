"""From the name of a method to the method."""

from openclaw_rl.config.options import ConfigError
from openclaw_rl.methods.base import Method
from openclaw_rl.methods.options import BUILT_IN, MethodOptions
from openclaw_rl.plugins import load_plugin

OPTION = "--method"
#: The names that a custom method may have in its file, if no name is given.
CLASS_NAMES = ("Method",)


def find_method(name: str) -> type[Method]:
    """The class of a built-in or custom (`path/file.py:Name`) method. Raises ConfigError."""
    method = load_plugin(BUILT_IN.get(name, name), OPTION, CLASS_NAMES)
    if not isinstance(method, type) or not issubclass(method, Method):
        raise ConfigError(
            f"{OPTION} {name} is not a method: write a class that inherits openclaw_rl.methods.base.Method."
        )
    return method


def check_options(options: MethodOptions) -> None:
    """Refuse options that contradict the method. A custom method is not imported for this. Raises ConfigError."""
    if options.method in BUILT_IN:
        find_method(options.method).check(options)


def make_method(options: MethodOptions) -> Method:
    """The method of the options, checked. Raises ConfigError."""
    method = find_method(options.method)
    method.check(options)
    return method(options)
