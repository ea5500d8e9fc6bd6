"""Records of benchmarks: files, layouts, fields and cases."""
