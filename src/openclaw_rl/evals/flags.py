"""Names that the arguments of `demo` and `eval` mention, apart from the evaluations: help loads nothing heavy."""

#: Options of the server that say which model runs where.
MODEL_OPTIONS = ("model_name", "cache_dir", "device", "seed")
#: The order in which methods are named everywhere.
METHODS = ("topk-select", "combine", "opd", "rl")
#: The environment variable with the key of the model that plays the person.
USER_KEY = "OPENCLAW_DEMO_USER_API_KEY"
#: What `eval` measures; the last needs a package of its own.
TASKS = ("conversation", "coding", "tool-use", "bfcl")
#: The name of the untrained model.
BASE = "base"
