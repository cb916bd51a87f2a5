"""Train and compare the runs of a study, which differ in a few fields of their config."""
