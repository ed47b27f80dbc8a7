"""The scorers that a rubric may name: all of them in a recipe's rubric, built-in and declared ones in a client's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.protos.error_text import printable
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.registry import RUBRIC, SCORERS, ScorerSpec, is_import_path, make_spec, unknown_scorer


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names that a rubric may use. `for_clients` refuses access to the service's machine and network."""

    declared: Mapping[str, ScorerSpec] = field(default_factory=dict)
    for_clients: bool = False

    @classmethod
    def of(cls, config: RewardConfig) -> Catalogue:
        """Builds a recipe's catalogue. Raises ScorerError for an unknown declared scorer or wrong arguments."""
        declared = {}
        for name, one in config.scorers.items():
            place = f"reward.scorers.{printable(name)}"
            if name in SCORERS or name == RUBRIC or not name or len(name) > 64 or not _is_name(name):
                what = "is taken" if name in SCORERS or name == RUBRIC else "should be up to 64 letters, digits, . _ -"
                raise ScorerError(f"{place}: the name {what}; give it another")
            declared[name] = make_spec(one.scorer, one.arguments, place)
        return cls(declared)

    def restricted(self) -> Catalogue:
        """Returns the same catalogue with the restrictions for clients."""
        return Catalogue(self.declared, for_clients=True)

    def spec(self, scorer: str, arguments: Mapping[str, object], place: str) -> ScorerSpec:
        """Returns the checked specification of the scorer with this name.

        Raises:
            ScorerError: the name is unknown, the arguments are wrong, or a client may not use them.
        """
        if scorer in self.declared:
            if arguments:
                raise ScorerError(
                    f"{place}.arguments: scorer {scorer} is declared with its arguments and takes no others"
                )
            return self.declared[scorer]
        if self.for_clients:
            self._refuse_what_is_the_recipes(scorer, arguments, place)
        return make_spec(scorer, arguments, place, known=self.declared)

    def _refuse_what_is_the_recipes(self, scorer: str, arguments: Mapping[str, object], place: str) -> None:
        remedy = "the service's recipe can declare it under a name in reward.scorers"
        if scorer not in SCORERS:
            names = [*self.declared, *(name for name in SCORERS if SCORERS[name].ISOLATION != "remote")]
            if is_import_path(scorer):
                raise ScorerError(
                    f"{place}.scorer {scorer!r:.100}: a client's rubric cannot name an import path; {remedy}"
                )
            raise unknown_scorer(scorer, names, place)
        if SCORERS[scorer].ISOLATION == "remote":
            raise ScorerError(
                f"{place}.scorer {scorer}: it names a folder or an address, which a client cannot; {remedy}"
            )
        for name in arguments:
            if name in SCORERS[scorer].RECIPE_ONLY:
                raise ScorerError(f"{place}.arguments.{name}: a client cannot set it; {remedy}")


def _is_name(text: str) -> bool:
    return text.isascii() and text.replace(".", "").replace("_", "").replace("-", "").isalnum()
