"""How bytes lie: frames, indexes, typed trees, names of objects. Pure; docs/format.md is the contract."""
