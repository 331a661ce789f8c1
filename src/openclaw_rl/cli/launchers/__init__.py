"""The launchers in `launch/`: which scripts there are, which variables they read, and which commands they run."""
