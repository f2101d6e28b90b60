"""The service sidecars report to: who they are, what they say, what they are told."""
