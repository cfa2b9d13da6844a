//! A hostile registry: it stands before a real one, and passes requests on or
//! answers them as a rule says.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// By lower-case name.
    pub(crate) headers: BTreeMap<String, String>,
    body: Vec<u8>,
    /// How many requests came before it, counting from 0.
    pub(crate) number: usize,
}

impl Request {
    /// Whether it wants the bytes of a blob.
    pub(crate) fn is_blob(&self) -> bool {
        self.method == "GET" && self.path.contains("/blobs/sha256:")
    }

    /// The same with other bytes to send.
    pub(crate) fn sending(&self, method: &str, path: &str, body: &[u8]) -> Request {
        let mut request = Request { method: method.into(), path: path.into(), body: body.to_vec(), ..self.clone() };
        request.headers.insert("content-length".into(), body.len().to_string());
        request
    }

    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    pub(crate) fn is_manifest(&self) -> bool {
        self.method == "GET" && self.path.contains("/manifests/")
    }
}

/// What the real registry answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Sends so many bytes of the body and then nothing, keeping the
    /// connection open.
    pub(crate) stall_at: Option<usize>,
    /// Closes the connection after so many bytes of the body.
    pub(crate) cut_at: Option<usize>,
    /// Sends the body byte by byte, with pauses.
    pub(crate) trickles: bool,
}

impl Answer {
    pub(crate) fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Answer { status, headers, body: body.to_vec(), stall_at: None, cut_at: None, trickles: false }
    }

    pub(crate) fn header(&mut self, name: &str, value: &str) {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self.headers.push((name.into(), value.into()));
    }
}

/// The real registry, for a rule to ask.
pub(crate) struct Upstream {
    port: u16,
}

impl Upstream {
    /// The true answer to a request.
    pub(crate) fn ask(&self, request: &Request) -> Answer {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let mut head = format!("{} {} HTTP/1.1\r\nConnection: close\r\n", request.method, request.path);
        for (name, value) in &request.headers {
            if name != "connection" && name != "authorization" {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&request.body).unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let headers = headers(&mut reader);
        let mut body = Vec::new();
        let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
        if request.method != "HEAD" {
            reader.read_to_end(&mut body).unwrap();
        }
        if chunked {
            body = unchunked(&body);
        }
        let keep = |name: &str| !matches!(name, "transfer-encoding" | "connection");
        let headers = headers.into_iter().filter(|(name, _)| keep(name)).collect();
        Answer { status, headers, body, stall_at: None, cut_at: None, trickles: false }
    }
}

fn headers(reader: &mut impl BufRead) -> Vec<(String, String)> {
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.to_owned())),
            None => return headers,
        }
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|w| w == b"\r\n").unwrap();
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[end + 4 + size..];
    }
}

type Rule = dyn Fn(&Request, &Upstream) -> Option<Answer> + Send + Sync;

/// A running front. It ends with this value.
pub(crate) struct Front {
    port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Front {
    /// Before the registry on `upstream`. A rule that gives `None` never
    /// answers.
    pub(crate) fn start(
        upstream: u16,
        rule: impl Fn(&Request, &Upstream) -> Option<Answer> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let ended = Arc::new(AtomicBool::new(false));
        let rule: Arc<Rule> = Arc::new(rule);
        let thread = {
            let (requests, ended) = (requests.clone(), ended.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if ended.load(Ordering::SeqCst) {
                        return;
                    }
                    let Ok(stream) = stream else { continue };
                    let (rule, requests, ended) = (rule.clone(), requests.clone(), ended.clone());
                    // Errors are of clients that went away.
                    std::thread::spawn(move || {
                        drop(serve(stream, &*rule, &Upstream { port: upstream }, &requests, &ended))
                    });
                }
            })
        };
        Front { port, requests, ended, thread: Some(thread) }
    }

    pub(crate) fn repository(&self, name: &str) -> String {
        format!("oci://127.0.0.1:{}/{name}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// What was asked so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(
    stream: TcpStream,
    rule: &Rule,
    upstream: &Upstream,
    requests: &Mutex<Vec<Request>>,
    ended: &AtomicBool,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(());
    }
    let mut words = line.split(' ');
    let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let headers: BTreeMap<String, String> = headers(&mut reader).into_iter().collect();
    let length = headers.get("content-length").map_or(0, |text| text.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request = {
        let mut requests = requests.lock().unwrap();
        let request = Request { method, path, headers, body, number: requests.len() };
        requests.push(request.clone());
        request
    };
    let hang = || {
        while !ended.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let Some(answer) = rule(&request, upstream) else {
        hang();
        return Ok(());
    };
    let mut stream = stream;
    let mut head = format!("HTTP/1.1 {} .\r\nconnection: close\r\n", answer.status);
    let mut has_length = false;
    for (name, value) in &answer.headers {
        has_length |= name.eq_ignore_ascii_case("content-length");
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !has_length {
        head.push_str(&format!("content-length: {}\r\n", answer.body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    let end = answer.stall_at.or(answer.cut_at).unwrap_or(answer.body.len()).min(answer.body.len());
    if answer.trickles {
        for byte in answer.body.chunks(1).take_while(|_| !ended.load(Ordering::SeqCst)) {
            stream.write_all(byte)?;
            std::thread::sleep(Duration::from_millis(50));
        }
    } else {
        stream.write_all(&answer.body[..end])?;
    }
    stream.flush()?;
    if answer.stall_at.is_some() {
        hang();
    }
    Ok(())
}

impl Drop for Front {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
