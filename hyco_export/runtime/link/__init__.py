"""Links for measurements: what a mobile network does to the calls between device and server."""
