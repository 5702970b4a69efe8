"""The name horovod for syncline.horovod: every module is the same object under both names."""

import sys

from syncline.horovod import alias

sys.modules[__name__] = alias.under(__name__)
