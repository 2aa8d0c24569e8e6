"""Puts this folder on the import path, so that tests below it find `scripted`, `raw_server` and `live_server`."""
