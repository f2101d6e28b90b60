"""Report service for sidecars: authentication, report parsing, replies."""
