"""Where images come from; importing the package registers the formats of image files.

Without Pillow or tifffile, as on a machine that checks its GPU with torch alone, there are fewer.
"""

import contextlib
import importlib
import pkgutil

from hires.data import formats

for _module in pkgutil.iter_modules(formats.__path__, f"{formats.__name__}."):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_module.name)
