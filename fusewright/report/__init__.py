"""fusewright/report"""
