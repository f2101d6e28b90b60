"""The way to the controller: heartbeats out, directives in."""
