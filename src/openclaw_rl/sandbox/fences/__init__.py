"""What a sandboxed program meets when it tries to leave: each module raises one fence around its own process.

This package runs in the sandbox's child, which is started without site packages: it imports nothing but the standard
library and itself, by relative names, since its name there is `fences` and not `openclaw_rl.sandbox.fences`.
"""
