"""One process per pod: arena, encode and upload pipeline, restore server, save timer. Imports no torch."""
