"""The reference runtime: draft trees, acceptance rules, the verifier server and the device driver."""
