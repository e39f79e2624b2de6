"""Package of the wrapper modules that were compiled on demand; its folders come from the process that compiled them."""

import os

FOLDERS = "AFD_COMPILED"
"""Environment variable; child processes inherit it."""

__path__ += [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
