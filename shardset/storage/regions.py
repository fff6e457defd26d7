"""The regions that a location of Cloud Storage covers."""

import re

_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_MULTI_REGIONS = {  # Cloud Storage's locations of more than one region
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


def holds(location: str, region: str) -> bool:
    """Whether a location (a region, `EU`, `NAM4`, `US-EAST1+US-WEST1`, in any case) covers the region."""
    locations = location.lower().split("+")
    return region in locations or any(
        each in _MULTI_REGIONS and _MULTI_REGIONS[each].fullmatch(region) for each in locations
    )


def is_known(location: str) -> bool:
    """Whether `holds` can tell: a region, two joined by `+`, or a multi-region listed here."""
    return all(each in _MULTI_REGIONS or _REGION.fullmatch(each) for each in location.lower().split("+"))
