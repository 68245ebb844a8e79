"""Where images come from; importing the package registers image formats and data sets.

Without Pillow or tifffile, as on a machine that checks its GPU with torch alone, there are fewer.
"""

import importlib
import pkgutil

from hires.data import formats, sources

for _package in (formats, sources):
    for _module in pkgutil.iter_modules(_package.__path__, f"{_package.__name__}."):
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("PIL", "tifffile"):
                raise
