"""On-store formats: frames, indexes, typed trees, object names. Pure; docs/format.md is the specification."""
