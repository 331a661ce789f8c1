"""The fences of the sandbox: `run_python` and `run_command` apply those of `kernel` and `syscalls` to their process.

This package runs in the sandbox's child process, which has no site packages. So it imports only the standard library
and itself, by relative names, because its name there is `fences` and not `openclaw_rl.sandbox.fences`.
"""
