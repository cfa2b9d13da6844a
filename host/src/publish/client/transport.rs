//! The HTTP agent: TLS, proxies, time-outs.
//!
//! TLS trusts what the machine trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR`
//! override it), so that a company's own authority works; where the machine
//! has no certificates, as in a bare container, Mozilla's are used. Proxies
//! come from `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`; the
//! loopback is never asked through one.

use std::time::Duration;

use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Proxy};

use super::RegistryOptions;
use crate::error::{Code, Error, Result};
use crate::publish::reference::Repository;

/// The longest wait for a connection, whatever the silence that is allowed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that are read from and written to a connection at once.
const BUFFER_BYTES: usize = 256 << 10;

/// An agent for a repository's registry.
pub(super) fn agent(repository: &Repository, plain: bool, options: &RegistryOptions) -> Result<Agent> {
    let quiet = Some(options.timeout);
    let proxy = if repository.is_loopback() { None } else { Proxy::try_from_env() };
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .https_only(!plain)
        // The client follows by itself, and not everything.
        .max_redirects(0)
        .user_agent(concat!("weightmill/", env!("CARGO_PKG_VERSION")))
        .proxy(proxy)
        .timeout_resolve(quiet)
        .timeout_connect(Some(options.timeout.min(CONNECT_TIMEOUT)))
        .timeout_send_request(quiet)
        .timeout_recv_response(quiet)
        .timeout_per_read(quiet)
        .timeout_per_write(quiet)
        .max_response_header_size(64 << 10)
        .input_buffer_size(BUFFER_BYTES)
        .output_buffer_size(BUFFER_BYTES)
        .max_idle_connections_per_host(options.connections.max(1));
    if !plain {
        config = config.tls_config(TlsConfig::builder().root_certs(roots()?).build());
    }
    Ok(config.build().new_agent())
}

fn roots() -> Result<RootCerts> {
    let native = rustls_native_certs::load_native_certs();
    let own = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| std::env::var_os(name).is_some());
    match (native.certs.is_empty(), own) {
        (false, _) => Ok(RootCerts::from(native.certs.iter().map(|der| Certificate::from_der(der).to_owned()))),
        (true, false) => Ok(RootCerts::WebPki),
        // Somebody chose which authorities to trust: others are no answer.
        (true, true) => {
            let why = native.errors.first().map(|e| format!(": {e}")).unwrap_or_default();
            Err(Error::new(
                Code::NetworkError,
                format!("no certificate could be read from SSL_CERT_FILE or SSL_CERT_DIR{why}"),
            )
            .hint("name a PEM file with certificate authorities, or unset the variable"))
        }
    }
}
