"""The device as it is now, whoever measured it: jtop where its service answers, sysfs and /proc always."""
