"""Which regions a location of Cloud Storage covers."""

import re

_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_PLACES = {
    "us": re.compile(r"us-.*"),
    "eu": re.compile(r"europe-(?!west2$|west6$).*"),  # London and Zurich are not in the European Union
    "asia": re.compile(r"asia-.*"),
    "nam4": re.compile(r"us-(central1|east1)"),
    "eur4": re.compile(r"europe-(north1|west4)"),
    "eur5": re.compile(r"europe-(west1|west2)"),
    "eur7": re.compile(r"europe-(west2|west3)"),
    "eur8": re.compile(r"europe-(west3|west6)"),
    "asia1": re.compile(r"asia-(northeast1|northeast2)"),
}
"""What Cloud Storage calls its locations that are more than one region."""


def holds(location: str, region: str) -> bool:
    """Whether a bucket of this location (a region, `EU`, `NAM4`, `US-EAST1+US-WEST1`, in any case) has bytes there."""
    places = location.lower().split("+")
    return region in places or any(place in _PLACES and _PLACES[place].fullmatch(region) for place in places)


def is_known(location: str) -> bool:
    """Whether `holds` can tell: one region, two joined by `+`, or a location of several regions that is listed here."""
    return all(place in _PLACES or _REGION.fullmatch(place) for place in location.lower().split("+"))
