"""Key files: how they are made, and what is said of those that cannot be used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate, load_certificates

from cotuned.config import load
from cotuned.wire.errors import ConfigError
from cotuned.wire.keys import Keys
from tests.curve_keys import KeyFolder, StartDaemon
from tests.test_daemon import command


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_keygen_makes_files_with_narrow_modes(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        server = command("keygen", "--server", "--directory", str(tmp_path / "keys"))
        client = command("keygen", "a-1", "--role", "actor", "--directory", str(tmp_path / "keys"))
    finally:
        os.umask(before)
    assert server.returncode == client.returncode == 0
    keys = tmp_path / "keys"
    assert server.stdout.split() == [str(keys / "server.key"), str(keys / "server.key_secret")]
    assert mode(keys / "server.key_secret") == mode(keys / "handout" / "a-1.key_secret") == 0o600
    assert {mode(path) for path in keys.rglob("*") if path.is_dir()} | {mode(keys)} == {0o700}
    public, secret = load_certificate(keys / "handout" / "a-1.key_secret")  # pyzmq's own reader
    assert secret is not None
    assert zmq.curve_public(secret) == public
    assert load_certificates(keys / "clients" / "actor") == {public: True}
    assert secret not in (keys / "clients" / "actor" / "a-1.key").read_bytes()
    assert not list(keys.rglob(".*"))  # no draft is left


def test_keygen_overwrites_nothing(tmp_path: Path) -> None:
    directory = ["--directory", str(tmp_path)]
    command("keygen", "--server", *directory)
    command("keygen", "a", "--role", "actor", *directory)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments in (["--server"], ["a", "--role", "actor"], ["a", "--role", "learner"]):
        result = command("keygen", *arguments, *directory)
        assert result.returncode == 1
        assert "is there already; nothing is overwritten" in result.stderr
    (tmp_path / "clients" / "actor" / "a.key").unlink()  # revoked; its secret is still handed out
    assert command("keygen", "a", "--role", "actor", *directory).returncode == 1
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: content for path, content in before.items() if path.name != "a.key"}
    (tmp_path / "server.key_secret").unlink()
    assert command("keygen", "--server", *directory).returncode == 1
    assert not (tmp_path / "server.key_secret").exists()  # half a pair is not made


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "expected either --server"),
        (["a"], 2, "expected either --server"),
        (["a", "--role", "actor", "--server"], 2, "expected either --server"),
        (["a", "--role", "root"], 2, "invalid choice"),
        (["../a", "--role", "actor"], 1, "name: got '../a'"),
        (["a/b", "--role", "actor"], 1, "name: got 'a/b'"),
    ],
)
def test_keygen_refuses_what_it_cannot_make(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    result = command("keygen", *arguments, "--directory", str(tmp_path / "keys"))
    assert result.returncode == code
    assert says in result.stderr
    assert not (tmp_path / "keys").exists()


def test_keys_hide_their_secret(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys").of("actor")
    assert keys.secret.decode() not in repr(keys)
    assert keys.public.decode()[:8] in repr(keys)


def test_what_is_no_key_is_named(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    secret, public = folder.folder / "handout" / "actor.key_secret", folder.folder / "server.key"
    for client, server, says in (
        (tmp_path / "none", public, "cannot read the key file"),
        (secret, tmp_path / "none", "cannot read the key file"),
        (public, public, "holds a public key only"),
        (secret, Path(__file__), "is not a key file"),
    ):
        with pytest.raises(ConfigError, match=says):
            Keys.load(client, server)
    good = folder.of("actor")
    for server, own, hidden in ((b"short", good.public, good.secret), (good.server, good.server, good.secret)):
        with pytest.raises(ConfigError) as caught:
            Keys(server, own, hidden)
        assert good.secret.decode() not in str(caught.value)
    for bits in (0o644, 0o620, 0o604):
        secret.chmod(bits)
        with pytest.raises(ConfigError, match="others may use this secret"):
            Keys.load(secret, public)
    secret.chmod(0o640)  # how Kubernetes hands it to a group
    Keys.load(secret, public)


def test_problems_end_the_start_with_a_sentence(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys").folder
    secret = folder / "server.key_secret"

    def start(key: Path = secret, **environment: str) -> str:
        result = command("serve", "--device", "cpu", "--security.server_key", str(key), **environment)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "security.server_key: cannot read the key file" in start(tmp_path / "none")
    assert "holds a public key only" in start(folder / "server.key")
    assert "is not a key file" in start(Path(__file__))
    secret.chmod(0o644)
    assert "others may use this secret (mode 0644, expected 0600)" in start()
    secret.chmod(0o600)
    assert "there is no folder" in start(COTUNED_SECURITY__CLIENTS=str(tmp_path / "none"))
    (folder / "clients" / "actor").chmod(0o777)
    assert "anybody may put a key into" in start()


def test_beyond_loopback_curve_is_enough_and_needed(tmp_path: Path, start_daemon: StartDaemon) -> None:
    folder = KeyFolder(tmp_path / "keys")
    endpoints = dict.fromkeys(("actions", "queries", "watch"), "tcp://0.0.0.0:0")
    daemon = start_daemon(endpoints=endpoints, security=folder.settings)
    endpoint = daemon.endpoint.replace("0.0.0.0", "127.0.0.1")
    assert not daemon.events("insecure")
    file = tmp_path / "open.yaml"
    file.write_text("endpoints: {queries: 'tcp://0.0.0.0:5584'}\n")
    with pytest.raises(ConfigError, match=r"security\.server_key"):
        load(file, environment=False)
    file.write_text("security: {clients: keys/clients}\n")
    with pytest.raises(ConfigError, match=r"security\.clients: got 'keys/clients' without security\.server_key"):
        load(file, environment=False)
    for who, code in (("observer", 0), ("actor", 0)):
        assert command("status", "--endpoint", endpoint, **folder.environment(who)).returncode == code
    assert (
        command("read", "583", "--endpoint", endpoint, **folder.environment("observer")).returncode == 1
    )  # no run yet
    refused = command("read", "583", "--endpoint", endpoint, **folder.environment("actor"))
    assert "has the role actor, expected learner or observer" in refused.stderr
    without = command("status", "--endpoint", endpoint)
    assert without.returncode == 1
    assert "wants keys" in without.stderr
