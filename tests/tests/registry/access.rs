//! Who may use a registry: passwords, helpers, tokens, and TLS.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::front::{Answer, Front};
use crate::server::{Server, Settings, skip};
use crate::world::{User, World, text};

/// Ada with the password "secret", as `htpasswd -Bbn ada secret` writes it.
const HTPASSWD: &str = "ada:$2y$05$t13A6KMtjI4OTVwPt57MtueLMfCML/pwenhF9T5inSrb9wE6EUq66\n";

pub(crate) fn docker_config(user: &User, config: &str) {
    let folder = user.home().join(".docker");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.json"), config).unwrap();
}

fn push(user: &User, server: &Server, more: &[&str]) -> weightmill_tests::Ran {
    let reference = format!("{}:1", server.repository("acme/cast"));
    let mut arguments = vec!["module", "push", "cast", &reference];
    arguments.extend(more);
    user.run(&arguments)
}

#[test]
fn a_name_and_password_come_from_docker_or_a_helper() {
    let world = World::new();
    let file = world.at("htpasswd");
    std::fs::write(&file, HTPASSWD).unwrap();
    let Some(server) = Server::start_with(world.folder.path(), &Settings { htpasswd: Some(file), tls: None }) else {
        return;
    };
    let registry = format!("127.0.0.1:{}", server.port());

    let nobody = world.user("nobody");
    let refused = push(&nobody, &server, &[]);
    assert_eq!((refused.code(), refused.status), ("registry_refused", 3));
    assert!(text(&refused.json["error"], "hint").contains(&format!("docker login {registry}")));

    // "ada:secret" and "ada:wrong".
    let ada = world.user("ada");
    docker_config(&ada, "{");
    let malformed = push(&ada, &server, &[]);
    assert_eq!(malformed.code(), "registry_refused");
    assert!(malformed.message().contains("config.json"), "{}", malformed.message());
    docker_config(&ada, &format!("{{\"auths\":{{\"{registry}\":{{\"auth\":\"YWRhOndyb25n\"}}}}}}"));
    assert_eq!(push(&ada, &server, &[]).code(), "registry_refused");
    docker_config(&ada, &format!("{{\"auths\":{{\"{registry}\":{{\"auth\":\"YWRhOnNlY3JldA==\"}}}}}}"));
    push(&ada, &server, &[]).ok();

    let mut helped = world.user("helped");
    let programs = world.at("programs");
    std::fs::create_dir_all(&programs).unwrap();
    let helper = programs.join("docker-credential-weightmill-test");
    std::fs::write(&helper, "#!/bin/sh\nread server\necho \"$server\" > \"$HOME/asked\"\necho '{\"Username\":\"ada\",\"Secret\":\"secret\"}'\n").unwrap();
    std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
    docker_config(&helped, &format!("{{\"credHelpers\":{{\"{registry}\":\"weightmill-test\"}}}}"));
    helped.set("PATH", format!("{}:{}", programs.display(), std::env::var("PATH").unwrap()));
    push(&helped, &server, &[]).ok();
    assert!(helped.home().join("asked").exists());
}

#[test]
fn tokens_are_fetched_from_where_the_registry_says() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let token = |request: &crate::front::Request| {
        let basic = request.headers.get("authorization").is_some_and(|value| value == "Basic YWRhOnNlY3JldA==");
        match basic && request.path.contains("service=weightmill-tests") && request.path.contains("scope=repository") {
            true => Answer::new(200, &[("content-type", "application/json")], b"{\"token\":\"t0ken\"}"),
            false => Answer::new(401, &[], b"{}"),
        }
    };
    let front = Front::start(server.port(), move |request, upstream| {
        if request.path.starts_with("/token") {
            return Some(token(request));
        }
        if request.headers.get("authorization").is_some_and(|value| value == "Bearer t0ken") {
            return Some(upstream.ask(request));
        }
        let host = &request.headers["host"];
        let challenge = format!(
            "Bearer realm=\"http://{host}/token\",service=\"weightmill-tests\",scope=\"repository:acme/cast:pull,push\""
        );
        Some(Answer::new(401, &[("www-authenticate", &challenge)], b"{}"))
    });
    let reference = format!("{}:1", front.repository("acme/cast"));
    let (nobody, ada) = (world.user("nobody"), world.user("ada"));
    assert_eq!(nobody.run(&["module", "push", "cast", &reference]).code(), "registry_refused");
    docker_config(&ada, &format!("{{\"auths\":{{\"127.0.0.1:{}\":{{\"auth\":\"YWRhOnNlY3JldA==\"}}}}}}", front.port()));
    let pushed = ada.run(&["module", "push", "cast", &reference]).ok();
    assert_eq!(ada.run(&["module", "pull", &reference]).ok()["module"], pushed["module"]);
    let asked = front.requests().iter().filter(|r| r.path.starts_with("/token")).count();
    assert!((1..=6).contains(&asked), "a token is used again: asked {asked} times");
}

#[test]
fn tls_is_checked_against_the_authorities_that_are_named() {
    let world = World::new();
    let Some((authority, certificate, key)) = certificates(&world) else { return };
    let settings = Settings { htpasswd: None, tls: Some((certificate, key)) };
    let Some(server) = Server::start_with(world.folder.path(), &settings) else { return };
    let mut user = world.user("user");
    user.set("SSL_CERT_FILE", authority.to_string_lossy());
    push(&user, &server, &["--tls"]).ok();
    let stranger = world.user("stranger");
    let refused = push(&stranger, &server, &["--tls"]);
    assert_eq!(refused.code(), "network_error", "{}", refused.stderr);
    // Plain HTTP to a TLS port is an answer that says no.
    assert!(["registry_refused", "network_error"].contains(&push(&user, &server, &[]).code()));
}

/// An authority and a certificate of 127.0.0.1 by it.
fn certificates(world: &World) -> Option<(PathBuf, PathBuf, PathBuf)> {
    let at = |name: &str| world.at(name);
    let extensions = at("extensions");
    std::fs::write(&extensions, "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n").unwrap();
    let shown = |path: PathBuf| path.to_string_lossy().into_owned();
    let (ca, ca_key, request) = (shown(at("ca.pem")), shown(at("ca.key")), shown(at("server.csr")));
    let (certificate, key) = (shown(at("server.pem")), shown(at("server.key")));
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let authority = ["req", "-x509", "-days", "30", "-subj", "/CN=weightmill tests", "-keyout", &ca_key, "-out", &ca];
    let server = ["req", "-subj", "/CN=127.0.0.1", "-keyout", &key, "-out", &request];
    let extensions = shown(extensions);
    let sign = [
        "x509",
        "-req",
        "-in",
        &request,
        "-CA",
        &ca,
        "-CAkey",
        &ca_key,
        "-CAcreateserial",
        "-days",
        "30",
        "-extfile",
        &extensions,
        "-out",
        &certificate,
    ];
    let steps = [[&authority[..], &curve].concat(), [&server[..], &curve].concat(), sign.to_vec()];
    for step in steps {
        let made = Command::new("openssl").args(step).output();
        if !made.is_ok_and(|o| o.status.success()) {
            skip("openssl is not installed, or makes no certificates");
            return None;
        }
    }
    Some((ca.into(), certificate.into(), key.into()))
}
