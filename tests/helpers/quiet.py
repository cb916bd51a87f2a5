"""Silences megatron-core's warnings about optional packages when it is imported, as the launcher does."""

from gsa_train.distributed.megatron_import import quiet_libraries

quiet_libraries()
