"""The trainer's side: handles, saves, restores and the connection to the agent. Floor 5; see `docs/design.md`."""
