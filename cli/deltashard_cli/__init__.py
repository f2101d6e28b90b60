"""The `deltashard` command: thin commands over pure functions, on any store."""
