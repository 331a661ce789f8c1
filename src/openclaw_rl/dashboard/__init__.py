"""`openclaw-rl report`: one page about a run, from what its directory holds, whether or not a server uses it."""
