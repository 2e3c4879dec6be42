"""Build `dpft` from settings.ini, the one place that names its version, its requirements and its commands."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
EXTRA = "_requirements"


def settings() -> dict[str, str]:
    "The `[DEFAULT]` section of settings.ini, without interpolation."
    parser = ConfigParser(interpolation=None)
    parser.read(HERE / "settings.ini", encoding="utf-8")
    return dict(parser.defaults())


def main() -> None:
    "Hand the settings to setuptools."
    config = settings()
    setup(
        name=config["lib_name"],
        version=config["version"],
        description=config["description"],
        long_description=(HERE / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        keywords=config["keywords"],
        author=config["author"],
        author_email=config["author_email"],
        url=config["git_url"],
        license="Apache-2.0",
        python_requires=f">={config['min_python']}",
        install_requires=config["requirements"].split(),
        extras_require={key.removesuffix(EXTRA): value.split() for key, value in config.items() if key.endswith(EXTRA)},
        packages=find_packages(include=["dpft", "dpft.*"]),
        package_data={"dpft": ["py.typed"]},
        include_package_data=True,
        zip_safe=False,
        entry_points={"console_scripts": config["console_scripts"].split()},
    )


if __name__ == "__main__":
    main()
