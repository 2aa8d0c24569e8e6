"""Which model classes are supported, and which fields of their configs are honoured.

Enters: a checkpoint's config. Leaves: its shape, or a refusal by name.
Read first: `config_fields.py`.
"""
