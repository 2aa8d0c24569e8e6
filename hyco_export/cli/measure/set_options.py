"""What the command line says of the prompts that systems answer."""

import msgspec

from hyco_export.errors import HycoError


class SetOptions(msgspec.Struct, frozen=True):
    """`--prompts`, `--per-category`, `--limit` and `--truncate`; None where they are not given."""

    prompts: str | None = None
    per_category: int | None = None
    limit: int | None = None
    truncate: int | None = None

    @property
    def is_set(self) -> bool:
        """Is a set named, in place of a number of the recipe's prompts."""
        return self.prompts is not None and not _is_number(self.prompts)

    @property
    def count(self) -> int | None:
        """How many of the recipe's prompts; None for its own number, and where a set is named.

        Raises:
            HycoError: less than one.
        """
        if self.prompts is None or self.is_set:
            return None
        if (number := int(self.prompts)) < 1:
            raise HycoError(f"--prompts is {number}, it must be at least 1", "give a number of prompts, or a set")
        return number

    def check(self, selects_prompts: bool = False) -> None:
        """Before anything is started.

        Args:
            selects_prompts: the options on questions take the recipe's prompts too.

        Raises:
            HycoError: an option that wants a set without one, no such set, or no such file.
        """
        _ = self.count  # refuses less than one
        if self.is_set:
            from hyco_export.evaluate.quality.prompt_sets import check_set

            check_set(self.prompts or "")
            return
        if selects_prompts:
            return
        for name in ("per_category", "limit", "truncate"):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise HycoError(f"{option} needs a set of questions", "name one with --prompts, or leave it out")


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
