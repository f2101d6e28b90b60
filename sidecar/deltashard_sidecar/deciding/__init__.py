"""Choice of the save interval, from measured save costs and counted failures."""
