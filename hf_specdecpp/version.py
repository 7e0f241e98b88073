__version__ = "0.1.0"
# The one place that says where the source is: setup.py makes the links of README absolute with it for package indexes.
REPOSITORY = "https://github.com/OWNER/hf_specdecpp"  # a placeholder until it is published
