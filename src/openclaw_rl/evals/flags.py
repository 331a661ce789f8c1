"""Names for the arguments of `demo` and `eval`, in a module of their own so that `--help` loads nothing heavy."""

from openclaw_rl.methods.options import BUILT_IN

#: Options of the server for which model runs where.
MODEL_OPTIONS = ("model_name", "cache_dir", "device", "seed")
#: All built-in methods, in the order in which they are shown: the newest first.
METHODS = tuple(reversed(BUILT_IN))
#: The environment variable with the key of the model that plays the person.
USER_KEY = "OPENCLAW_DEMO_USER_API_KEY"
#: What `eval` measures. The last task needs another package.
TASKS = ("conversation", "coding", "tool-use", "bfcl")
#: The name of the untrained model.
BASE = "base"
