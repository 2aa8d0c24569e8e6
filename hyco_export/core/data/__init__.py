"""Conversations from files, folders, Parquet and the Hub, alone or mixed; and what tells two of them apart."""
