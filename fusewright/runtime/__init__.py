"""fusewright/runtime"""
