"""fusewright/tools"""
