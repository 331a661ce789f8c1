"""The durable record of every turn, and the states it goes through. SQLite in the run directory."""
