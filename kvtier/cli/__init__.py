"""The `kvtier` command: one file per subcommand, registered in `main`."""
