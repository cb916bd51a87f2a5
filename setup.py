"""What pyproject.toml cannot say: the packages lie in three folders, and configs/ becomes `gsa_train.configs`."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(".", include=["gsa_train*", "gsa_eval*", "gsa_study*", "gsa_hf*"]),
        *find_packages("kernels", include=["gsa_kernels*"]),
        *find_packages("data", include=["gsa_data*"]),
        "gsa_train.configs",
    ],
    package_dir={
        "gsa_kernels": "kernels/gsa_kernels",
        "gsa_data": "data/gsa_data",
        "gsa_train.configs": "configs",
    },
)
