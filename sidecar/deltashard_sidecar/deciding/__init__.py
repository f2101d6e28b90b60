"""How often this run saves, decided here: what saves cost is measured, failures are counted, the interval follows."""
