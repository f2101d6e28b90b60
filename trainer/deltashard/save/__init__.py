"""Snapshots of a training program: when they are taken, what they contain, how they are sent, how they end."""
