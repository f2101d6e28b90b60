"""The controller: watches and reports in, CheckpointRuns, Events and directives out."""
