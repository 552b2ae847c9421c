"""docs/reference/settings.md equals the code."""

from deploy import settings_page
from deploy.helm.schema import SETTINGS


def test_the_page_is_what_the_settings_say() -> None:
    said = "services' settings changed; write the page anew: python -m deploy.settings_page (or make chart)"
    assert settings_page.PAGE.read_text() == settings_page.page(), said


def test_every_setting_is_there_with_its_words() -> None:
    page = settings_page.page()
    for settings in SETTINGS.values():
        for name, field in settings.model_fields.items():
            assert f"| `{name}` " in page
            assert field.description, name
